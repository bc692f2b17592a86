"""From what the user asked for to the list of cells: options, the matrix, and what is expected of a subject.

Pure apart from reading expectation files. Nothing is launched here.
"""
