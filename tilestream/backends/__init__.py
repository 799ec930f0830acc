"""The kernels, one folder per backend; imported when first chosen."""
