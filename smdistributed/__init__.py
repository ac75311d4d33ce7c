"""Import names of the original libraries; everything is in `smddp`."""
