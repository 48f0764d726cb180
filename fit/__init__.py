"""Makes the data in db/: run its modules from the checkout's root, such as ``python -m fit.campaign``.

README.md gives the order.
"""
