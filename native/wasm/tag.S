# Defines the WebAssembly tag of C++ exceptions, which the compiler expects the runtime library to provide. The tag
# carries one pointer to the exception.
	.tagtype __cpp_exception i32
	.globl __cpp_exception
__cpp_exception:
