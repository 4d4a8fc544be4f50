"""TD-MPC2 trained end to end on one accelerator."""

__version__ = "0.1.0"
