"""One site on the network: it meets its neighbours over TLS and trains with them."""
