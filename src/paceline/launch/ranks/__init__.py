"""The rank processes of this host: their entry point, their records and who watches them."""
