"""What was taken, as other packages' arrays: a module for each, loaded when first asked for."""
