"""Programs that generate pages of the documentation site and check its links."""
