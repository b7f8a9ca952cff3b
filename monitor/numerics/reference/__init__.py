"""The law in rational numbers and integers: slow and obviously right, one element at a time.

Engines are tested against it, and it decides the rare element that FP64 leaves open.
"""
