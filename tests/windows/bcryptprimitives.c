/* Rust's standard library takes random numbers from ProcessPrng of bcryptprimitives.dll, which Wine 8 does not have. This is
 * that function, by SystemFunction036 (RtlGenRandom) of advapi32. */
#include <stddef.h>

__declspec(dllimport) unsigned char __stdcall SystemFunction036(void *buffer, unsigned long length);

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char *buffer, size_t length)
{
    for (size_t done = 0; done < length;) {
        unsigned long part = length - done < 65536 ? (unsigned long)(length - done) : 65536;
        if (!SystemFunction036(buffer + done, part))
            return 0;
        done += part;
    }
    return 1;
}
