"""Helpers of this package's own modules; users import none of them."""
