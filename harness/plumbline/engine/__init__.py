"""One cell from launch to findings, and stored traces judged again: joins launching, judging and results."""
