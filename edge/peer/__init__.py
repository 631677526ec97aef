"""What does a daemon do for coordinators?"""
