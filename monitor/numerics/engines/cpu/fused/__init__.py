"""One kernel in place of an operator's row, for plain FP32 tensors in the processor's memory, with the row's bits.

A fused kernel declines with ``NotImplemented`` whatever it is not made for: other types, devices, strides,
broadcasting, options. Then the row's own code serves.
"""
