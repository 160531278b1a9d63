"""Results of takes as other packages' arrays: one module a package, loaded when first used."""
