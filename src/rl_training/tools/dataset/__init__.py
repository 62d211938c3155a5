"""``rl-training dataset``: lists, describes and writes datasets of recorded episodes."""
