"""``floret node``: a SuperNode and a warm client process, from start to stop."""
