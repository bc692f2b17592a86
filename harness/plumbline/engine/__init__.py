"""One cell from launch to findings, cells side by side, and stored traces judged again."""
