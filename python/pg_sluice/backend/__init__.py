"""What runs inside a user's session, under PL/Python.

`plpy` is an argument everywhere, so that the package can be imported outside a server. `entry` is
the only module that SQL calls. `definitions` runs with the caller's rights; `control` and `settle`
run with the extension's rights and are reached only through its SECURITY DEFINER functions.
"""
