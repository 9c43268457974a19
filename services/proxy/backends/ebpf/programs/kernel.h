/* Helpers of the kernel and constants that all programs share. */
#ifndef KEELSON_KERNEL_H
#define KEELSON_KERNEL_H

#include <linux/bpf.h>

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

static void *(*const map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*const map_update)(void *map, const void *key, const void *value, __u64 flags) =
	(void *)BPF_FUNC_map_update_elem;
static long (*const map_delete)(void *map, const void *key) = (void *)BPF_FUNC_map_delete_elem;
static __u32 (*const random32)(void) = (void *)BPF_FUNC_get_prandom_u32;

/* A map as BTF describes it: numbers are lengths of arrays, types are pointers. */
#define NUMBER(name, value) int(*name)[value]
#define TYPE(name, type) typeof(type) *name

#define MAP(map, kind, key_type, value_type, size, options)                    \
	struct {                                                               \
		NUMBER(type, kind);                                            \
		NUMBER(map_flags, options);                                    \
		NUMBER(max_entries, size);                                     \
		TYPE(key, key_type);                                           \
		TYPE(value, value_type);                                       \
	} map SEC(".maps")

#define NANOSECONDS 1000000000ULL
#define TCP 6
#define UDP 17
#define FAMILY_IPV4 2
#define FAMILY_IPV6 10

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MAPPED_PREFIX 0xffff0000u
#else
#define MAPPED_PREFIX 0x0000ffffu
#endif

#endif
