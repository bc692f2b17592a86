"""What one device computes, in float64, and how much error rounding alone explains.

Shares no code with any trainer. Findings and outcomes do not belong here.
"""
