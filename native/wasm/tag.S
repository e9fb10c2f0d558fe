# The tag of C++ exceptions, which the compiler expects from the runtime library: one pointer to the exception.
	.tagtype __cpp_exception i32
	.globl __cpp_exception
__cpp_exception:
