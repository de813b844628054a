"""Applications built on the core, which never imports them."""
