"""What one device computes, in float64, and how much error rounding alone explains.

Shares no code with any trainer, and does not know what a check does with its results.
"""
