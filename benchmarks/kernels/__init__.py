"""The CPU kernels alone, against torch's operators and the machine's ceilings."""
