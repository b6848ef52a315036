"""Plans for those who do not want recoup at run time: plain PyTorch, transformers' setting, an FSDP policy."""
