"""Takes cells from launch to findings, singly or several at once, and judges stored traces again."""
