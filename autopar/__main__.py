"""``python -m autopar`` and ``torchrun -m autopar``: the same commands as ``autopar``."""

from autopar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
