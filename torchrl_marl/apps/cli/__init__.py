"""The command line ``torchrl-marl``."""
