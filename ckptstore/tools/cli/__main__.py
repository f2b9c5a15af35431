"""`python -m ckptstore.tools.cli` is the command `ckptstore`."""

from ckptstore.tools.cli import main

if __name__ == "__main__":
    main(prog_name="ckptstore")
