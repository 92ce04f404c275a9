"""Synchronous training: the name that launch scripts use."""

import sys

try:
    from miles.cli import train
except ModuleNotFoundError as error:
    sys.exit(f"{error}: miles is not installed for {sys.executable}; run `pip install -e .` where train.py lies")

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], program="train"))
