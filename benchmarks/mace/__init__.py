"""MACE's figures 5 and 10 to 13 and table 1: simulated at its scale, measured at a small one."""
