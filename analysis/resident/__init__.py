"""How a command reaches a pool's resident process, which has loaded everything, so that it loads nothing itself."""
