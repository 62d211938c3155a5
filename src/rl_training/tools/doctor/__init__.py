"""``rl-training doctor``: measures a config on this machine and recommends settings."""
