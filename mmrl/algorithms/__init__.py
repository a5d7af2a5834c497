"""The algorithms of the three papers, one file per family, behind one literal dict."""
