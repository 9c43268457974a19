#!/usr/bin/perl
# Finds modules that depend on each other. Prints each cycle with the paths that make it, and fails if there is any.
#
# In: the .rs files that git tracks in the src folder of every crate. A module depends on another by a path that starts with
# `crate`, `super` or `self`, in a `use` or in code. Re-exports are followed to the module that has the item. An edge is counted
# between the two siblings that contain both modules. A module and its own children may use each other; test code may use all,
# and so may the crates below tests/.
use strict;
use warnings;

my (%module, %edges, %items, %names, %globs, %paths, %test_only);

# Blanks comments, strings and character literals, and keeps the lines.
sub without_text {
    my ($text) = @_;
    my $blank = sub { (my $same = $_[0]) =~ s/[^\n]/ /g; $same };
    $text =~ s{(//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\2|"(?:[^"\\]|\\.)*"|'(?:[^'\\\n]|\\[^\n]{1,9}?)')}{$blank->($1)}gse;
    return $text;
}

# The place after the brace that closes the one at $from.
sub end_of_block {
    my ($text, $from) = @_;
    my $depth = 0;
    pos($$text) = $from;
    while ($$text =~ /([{}])/g) {
        $depth += $1 eq '{' ? 1 : -1;
        return pos($$text) if $depth == 0;
    }
    return length $$text;
}

# Paths of a `use`: [segments, name].
sub expand {
    my ($tree, @before) = @_;
    $tree =~ s/^\s+|\s+$//g;
    if ($tree =~ /^((?:\w+\s*::\s*)*)\{(.*)\}$/s) {
        my ($start, $inner) = ($1, $2);
        my @start = $start =~ /(\w+)/g;
        my ($depth, $part, @all) = (0, '');
        for my $char (split(//, $inner), ',') {
            $depth++ if $char eq '{';
            $depth-- if $char eq '}';
            if ($char eq ',' && $depth == 0) {
                push @all, expand($part, @before, @start) if $part =~ /\S/;
                $part = '';
            } else {
                $part .= $char;
            }
        }
        return @all;
    }
    my ($path, $name) = split /\s+as\s+/, $tree;
    my @path = (@before, $path =~ /(\w+|\*)/g);
    pop @path if @path > 1 && $path[-1] eq 'self';
    return [\@path, $name // $path[-1]];
}

# Segments from the root of the crate; none for another crate.
sub absolute {
    my ($crate, $at, @path) = @_;
    my @at = @$at;
    return @path[1 .. $#path] if $path[0] eq 'crate';
    if ($path[0] =~ /^(?:self|super)$/) {
        while (@path && $path[0] =~ /^(?:self|super)$/) { pop @at if shift(@path) eq 'super' }
        return (@at, @path);
    }
    my $key = join '::', $crate, @at;
    return (@at, @path) if $module{"${key}::$path[0]"};
    return;
}

sub read_module {
    my ($file, $text, $crate, @at) = @_;
    my $key = join '::', $crate, @at;
    $module{$key} = 1;
    # Test code.
    while ($text =~ /#\[cfg\((?:test|all\(test\b[^\]]*|any\(test\b[^\]]*)\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?(mod|use|fn|impl|const|static|struct|enum)\b([^;{]*)([;{])/g) {
        my ($start, $end, $kind, $name, $mark) = ($-[0], pos($text), $1, $2, $3);
        $test_only{"${key}::$1"} = 1 if $kind eq 'mod' && $mark eq ';' && $name =~ /(\w+)/;
        if ($kind eq 'use') { $end = index($text, ';', $start) + 1 }
        elsif ($mark eq '{') { $end = end_of_block(\$text, $end - 1) }
        (my $blank = substr($text, $start, $end - $start)) =~ s/[^\n]/ /g;
        substr($text, $start, $end - $start) = $blank;
        pos($text) = $end;
    }
    while ($text =~ /\bmod\s+(\w+)\s*(\{)/g) {
        my ($name, $from) = ($1, $-[2]);
        my $end = end_of_block(\$text, $from);
        my $inner = substr($text, $from + 1, $end - $from - 2);
        (my $lines = substr($text, 0, $from)) =~ s/[^\n]//g;
        read_module($file, $lines . $inner, $crate, @at, $name);
        (my $blank = substr($text, $from, $end - $from)) =~ s/[^\n]/ /g;
        substr($text, $from, $end - $from) = $blank;
        pos($text) = $end;
    }
    $items{$key}{$1} = 1 while $text =~ /\b(?:fn|struct|enum|trait|type|const|static|union)\s+(\w+)/g;
    my $add = sub {
        my ($path, $place) = @_;
        my $line = 1 + (substr($text, 0, $place) =~ tr/\n//);
        push @{ $paths{$key} }, [$path, "$file:$line"];
    };
    while ($text =~ /\buse\s+([^;]+);/g) {
        my ($tree, $place, $end) = ($1, $-[0], pos($text));
        for my $use (expand($tree)) {
            my ($path, $name) = @$use;
            if ($path->[-1] eq '*') { push @{ $globs{$key} }, [@{$path}[0 .. $#$path - 1]] }
            else { $names{$key}{$name} = $path }
            $add->($path, $place);
        }
        (my $blank = substr($text, $place, $end - $place)) =~ s/[^\n]/ /g;
        substr($text, $place, $end - $place) = $blank;
        pos($text) = $end;
    }
    while ($text =~ /(?<![\w:\$])((?:crate|self|super)(?:::\w+)+)/g) {
        $add->([split /::/, $1], $-[0]);
    }
}

# The module that has what a path names, as segments from the root; nothing for another crate.
sub target {
    my ($crate, $at, $path, $depth) = @_;
    return if $depth > 9;
    my @rest = absolute($crate, $at, @$path);
    return if !@rest;
    my @now;
    while (@rest) {
        my $key = join '::', $crate, @now;
        my $next = shift @rest;
        last if $next eq '*';
        if ($module{"${key}::$next"}) { push @now, $next; next }
        last if $items{$key}{$next};
        if (my $used = $names{$key}{$next}) {
            return if !absolute($crate, \@now, @$used);
            return target($crate, \@now, $used, $depth + 1) // \@now if !@rest;
            return target($crate, \@now, [@$used, @rest], $depth + 1) // \@now;
        }
        for my $glob (@{ $globs{$key} // [] }) {
            my @inside = absolute($crate, \@now, @$glob);
            return \@inside if @inside && $items{ join '::', $crate, @inside }{$next};
        }
        last;
    }
    return \@now;
}

for my $file (split /\n/, `git ls-files '*.rs'`) {
    next if $file !~ m{^(.*?)/src/(.*)\.rs$} || $file =~ m{/build\.rs$};
    my ($crate, $inside) = ($1, $2);
    next if $crate =~ m{^(?:tests|fuzz)/};
    my @at = split m{/}, $inside;
    next if $at[0] eq 'bin';
    $crate .= ' (program)' if $inside eq 'main' && -e "$crate/src/lib.rs";
    pop @at if @at == 1 && $at[0] =~ /^(?:lib|main)$/;
    pop @at if @at && $at[-1] eq 'mod';
    open my $in, '<', $file or die "cannot read $file: $!\n";
    local $/;
    read_module($file, without_text(scalar <$in>), $crate, @at);
}

for my $key (sort keys %paths) {
    my $outer = $key;
    my $is_test = 0;
    while ($outer =~ /::/) { $is_test ||= $test_only{$outer}; $outer =~ s/::\w+$// }
    next if $is_test;
    my ($crate, @at) = split /::/, $key;
    for my $found (@{ $paths{$key} }) {
        my ($path, $where) = @$found;
        my $target = target($crate, \@at, $path, 0) or next;
        my $same = 0;
        $same++ while $same < @at && $same < @$target && $at[$same] eq $target->[$same];
        next if $same == @at || $same == @$target;
        my $parent = join '::', $crate, @at[0 .. $same - 1];
        push @{ $edges{$parent}{ $at[$same] }{ $target->[$same] } }, "$where: " . join('::', @$path);
    }
}

my $cycles = 0;
for my $parent (sort keys %edges) {
    my $from = $edges{$parent};
    my %reach;
    for my $start (keys %$from) {
        my @todo = keys %{ $from->{$start} };
        while (defined(my $next = pop @todo)) {
            push @todo, keys %{ $from->{$next} // {} } if !$reach{$start}{$next}++;
        }
    }
    for my $one (sort keys %$from) {
        for my $other (sort keys %{ $from->{$one} }) {
            next if !$reach{$other}{$one};
            $cycles++;
            print "$parent: $one uses $other, which needs $one:\n";
            print "    $_\n" for @{ $from->{$one}{$other} };
        }
    }
}
exit($cycles > 0);
