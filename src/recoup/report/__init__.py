"""Plans, profiles and evidence for people. No torch: renderers take plain data."""
