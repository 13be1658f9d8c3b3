"""The one door to private torch APIs and to differences between torch versions.

Nothing is patched on import. A patch is a context manager that undoes itself and says why it is needed.
"""
