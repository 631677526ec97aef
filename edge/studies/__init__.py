"""What is asked of a model beside answers?"""
