"""How small an error the judge notices: known errors, put into what a right training recorded, larger and smaller.

Training one cell and judging it are ``engine``'s and the judge's; what is put where, and how the limit is searched,
belongs here.
"""
