"""Documents to token ids: templates, the length rule, pieces of long documents."""
