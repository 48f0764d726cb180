"""Reports of what was found: values with renderers; they print nothing and measure nothing."""
