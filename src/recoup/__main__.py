"""`python -m recoup`: the command line."""

from recoup.cli.main import main

main()
