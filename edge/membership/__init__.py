"""Who is of this cluster, and how does a device show it?"""
