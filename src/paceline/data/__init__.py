"""Sources and formats, tokenising, packing, the sample order, the loader with a saveable
position."""
