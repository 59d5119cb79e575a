"""RT-LM's tables III and IV, figures 9 to 14: response times by policy on real answer lengths."""
