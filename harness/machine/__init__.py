"""What this machine is and how busy it is: fingerprint, load, device lease, and the doctor's questions.

Nothing here knows of cells or findings.
"""
