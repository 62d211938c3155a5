"""``rl-training watch``: run folders on a web page of this machine, updated while runs write."""
