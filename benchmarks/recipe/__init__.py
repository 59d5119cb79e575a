"""The search for the learning recipe's defaults and for the bounds of the gate."""
