"""`python -m tunegemm`: the same as the `tunegemm` command."""

from tunegemm.cli import main

if __name__ == "__main__":
    main()
