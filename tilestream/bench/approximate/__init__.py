"""``tilestream bench approximate``: exact, block-sparse and approximate attention, and what each gives up.

`methods` and `packages` are the contestants, `cells` what is measured, `suite` the measuring, `states` real queries,
keys and values, `checks` what a result is worth, `bars` the claims and tables, `figure` the picture.
"""
