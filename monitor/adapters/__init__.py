"""Recorders in the training loops of other libraries, which are imported only where one is used."""
