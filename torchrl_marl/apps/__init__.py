"""Applications of the core: what people do with runs. The core never imports them."""
