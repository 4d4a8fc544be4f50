"""Trains TD-MPC2; `python train.py --help` lists the settings."""

import sys

from mjx_tdmpc2.cli import main

if __name__ == "__main__":
  sys.exit(main())
