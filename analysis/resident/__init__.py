"""Commands that a pool runs in a copy of a process that has loaded everything, so that they load nothing themselves."""
